"""What all benchmarks share.

arguments     --quick and --tiny; the line of JSON at the end; tables
hosts         a function on every host of the lab, or on plain processes of this machine
interleaved   methods timed in turns, in one run
results       runs for several seeds, kept in a file and skipped when they are there
learning      the training loop and the validation loss
virtual       replicas as threads of one process
curves        the loss of `thinwire train` over steps and seconds
"""
