"""Starts ranks: over ssh, under Horovod's launcher, by hand, in a notebook, or by a cluster's files.

`command` makes a `job` of a command line (`options`). For a cluster, `cluster_files` writes its
files, by the settings and checks of its kind (`cluster_kinds`). Over ssh, `restart` starts the job,
again if that can help: it checks the `remote_hosts`, and runs the launcher under a `supervisor`,
which passes signals to the ranks (`on_host`), shows what they write (`output`) and names the
`first_failure`.

The launcher is mpirun, or Horovod's with our changes (`horovod_launcher`, `horovod_changes`).
`horovodrun` is the same without a job. `by_hand` starts one process. Gloo's ranks find each other
in the store of `rendezvous`, where processes by hand meet first. `notebook` runs the launcher with
a function for each rank.
"""
