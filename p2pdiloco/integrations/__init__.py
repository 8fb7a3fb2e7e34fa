"""Callbacks for the Hugging Face Trainer and for Lightning. Each module needs its library."""
