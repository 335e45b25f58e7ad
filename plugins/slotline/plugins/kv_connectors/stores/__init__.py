"""Parts of connectors whose blocks lie outside the process: staging rows, threads, and what a store is asked."""
