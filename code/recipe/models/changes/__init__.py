"""What a job changes of a model before it trains it: adapters, tokens, positions, frozen layers."""
