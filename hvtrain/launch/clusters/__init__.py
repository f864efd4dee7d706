"""Files for schedulers: `kinds` has the settings and checks of each, `choice` renders and submits the files."""
