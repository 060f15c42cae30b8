"""python -m playground"""

import sys

if __name__ == "__main__":
    try:
        from playground.app import main
    except KeyboardInterrupt:  # Ctrl-C while Python is still reading files
        sys.exit(130)
    main()
