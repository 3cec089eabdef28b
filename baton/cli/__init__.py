"""The commands of `baton`, one module each, and the flags they share."""

from cluster.process import grpc_log

grpc_log.silence()  # here, because the commands' modules import grpc
