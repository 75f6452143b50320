"""FSDP1, DeepSpeed and Megatron."""
