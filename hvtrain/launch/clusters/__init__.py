"""Files for schedulers: one module for each with its settings and checks; the files come from conf/cluster/."""
