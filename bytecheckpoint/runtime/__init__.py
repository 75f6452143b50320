"""Parts that read and write no checkpoint: threads, buffers, timers, priorities, progress."""
