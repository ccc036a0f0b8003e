"""Parts of the proof on a GPU, printed."""

from benchmarks.gpu import main

if __name__ == "__main__":
    main()
