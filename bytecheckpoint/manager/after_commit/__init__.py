"""Work of rank 0 after each commit: records, retention, and copies to a second root."""
