"""`baton fetch`: a model's directory from the Hugging Face Hub, every file's hash checked.

listing.py reads what a repository holds; hub.py downloads single files; fetch.py several at once, under the limits of
limits.py and the lock of lock.py, by which pods that share a volume download a model once; report.py shows progress.
"""
