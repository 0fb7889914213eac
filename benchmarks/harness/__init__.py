"""What all benchmarks share.

    arguments     --quick and --tiny; tables; the line of JSON at the end
    hosts         a function on every host of the lab (worker), or on forks of this process (forks);
                  what it tells meanwhile and what it returns (telling)
    interleaved   methods timed in turns, in one run
    results       runs for several seeds, kept in a file and skipped when they are there
    learning      the training loop and the validation loss
    virtual       replicas as threads of one process
    curves        the loss of `thinwire train` over steps and seconds

The benchmarks themselves are in the folders beside it.
"""
