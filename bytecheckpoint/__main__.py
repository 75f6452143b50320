"""`python -m bytecheckpoint` is `bcp`, where the program itself is not on the path."""

from __future__ import annotations

from bytecheckpoint.tools.main import main

if __name__ == "__main__":
    main()
