"""Model code: configuration, weights, decoder and paged attention of the llama family.

`config.py` needs no torch; the other modules do, so this package imports none of them.
"""
