"""The only place that touches SGLang's internals: hooks, their proof, and what they hang on SGLang's groups."""
