"""Benchmarks: batches, peers, the correctness gate, interleaved timing, memory and import cost, tables and plots."""
