"""shmserve: a single-host LLM inference server whose boundary is a bounded shared-memory ring."""

__version__ = "0.1.0"
