"""Starts ranks: over ssh, with Horovod's launcher, by hand, from a notebook, or through a cluster's job files.

`command` turns a command line (`options`) into a `job`. For a cluster, `cluster_files` writes the job
files, using the settings and checks of the cluster's kind (`cluster_kinds`). Over ssh, `restart` starts
the job, and restarts it where that can help: it checks the `remote_hosts` and runs the launcher under a
`supervisor`, which passes signals to the ranks (`on_host`), shows their output (`output`) and names the
`first_failure`.

The launcher is mpirun, or Horovod's with our changes (`horovod_launcher`, `horovod_changes`).
`horovodrun` supervises the latter without a job. `by_hand` starts a single process. Gloo ranks find each
other through the store in `rendezvous`; processes started by hand claim their ranks there first.
`notebook` uses the launcher to call a function on every rank.
"""
