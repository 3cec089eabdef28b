"""Every metric of every process, declared once."""
