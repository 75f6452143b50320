"""Tests against Hugging Face's Trainer itself."""
