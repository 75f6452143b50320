"""What any long-running process needs: threads, buffers, timers, priorities. Nothing here knows a checkpoint."""
