"""The live view: what the cluster does now and has done in the last minutes, as `/v1/cluster/live` shows it."""
