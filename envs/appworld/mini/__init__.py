"""Our own tasks for AppWorld's engine, so that it runs where its data cannot be downloaded."""
