"""A worker of Ray's is not a process of Ray's: a replica keeps it, and when the replica ends without a word (Ray's node
died, somebody killed the replica), the worker goes on and the next replica takes it over.

replica (Keeper) ──unix socket──► worker process      its own session; no child of the replica's
   │ holds DIR/KEY.ID.lock          │ listens on DIR/KEY.ID.sock
"""
