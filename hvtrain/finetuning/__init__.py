"""Between a built model and its training: first weights, which parts train and how, averages of the weights."""
