"""`python -m mimo.cli` is `mimo`."""

from mimo.cli.main import main

if __name__ == "__main__":
    main()
