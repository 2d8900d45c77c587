"""DualPath for SGLang: KV cache storage for agents."""
