"""Parts for any long-running process: threads, buffers, timers, priorities. Nothing here knows a checkpoint."""
