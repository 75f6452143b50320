"""Values of single ranks: `RankLocal`, random number generators, and their merging for another number of ranks."""
