"""``python -m freenergy``, which torchrun and ``accelerate launch -m`` start."""

from freenergy.cli import main

if __name__ == "__main__":
    main()
