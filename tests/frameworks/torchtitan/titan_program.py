"""The program of a rank that trains with torchtitan: see titan_runs.py."""

from frameworks.torchtitan.titan_runs import main

if __name__ == "__main__":
    main()
