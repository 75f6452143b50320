"""The library behind the calls of training frameworks, one module for each, which alone imports its framework."""
