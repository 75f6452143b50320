"""Commands about many checkpoints: `bcp ls`, `bcp du`, `bcp watch`, `bcp report` and `bcp memory`."""
