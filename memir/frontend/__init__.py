"""From a target to a traced, lowered step: loading, tracing, lowering. Imports torch and transformers."""
