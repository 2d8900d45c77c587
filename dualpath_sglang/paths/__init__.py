"""Running a read over both paths: this node's storage NIC, and those of other nodes."""
