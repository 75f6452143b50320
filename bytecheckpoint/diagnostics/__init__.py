"""Verification of checkpoints, guarantees and speed of stores, telemetry of saves."""
