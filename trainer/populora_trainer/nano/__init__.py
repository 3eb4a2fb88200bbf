"""The embedded base model: its program generator, corpus, tokenizer, training script, scores and shipped weights.

May import the compact formats of `tasks` and nothing above them (no population, rollout, learning or loop).
"""
