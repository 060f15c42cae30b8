"""python -m playground"""

from playground.app import main

if __name__ == "__main__":
    main()
