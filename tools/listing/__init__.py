"""Commands about many checkpoints: `bcp ls` lists them, `bcp du` adds up bytes, `bcp watch` waits for new ones."""
