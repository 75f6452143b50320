"""Tests that need several processes. They share one pool of workers: see workers.py."""
