"""Tests that break things: stores, ranks, disks, processes."""
