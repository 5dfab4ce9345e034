"""Shared-memory rings: bounded, single-producer single-consumer, fixed-size slots, woken by eventfd.

Knows no word of language models: it moves slots. Import order inside: layout, segment, wakeup, spsc, policy, channel, board,
observe.
"""
