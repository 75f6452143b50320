"""Checkpoint folders of frameworks: DCP, Megatron, DeepSpeed, the Hugging Face Trainer."""
