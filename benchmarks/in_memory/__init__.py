"""Parts of the benchmark of memory checkpoints: other libraries, and goals with their targets."""
