"""Tests against accelerate itself."""
