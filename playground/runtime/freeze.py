"""Imported last by the fork server: what it has imported is from then on left alone by Python's garbage collector.

A collection in a rank would write to the header of every object it inherited, and so copy the pages that all ranks
share. Source: https://docs.python.org/3/library/gc.html#gc.freeze
"""

import gc

gc.collect()
gc.freeze()
