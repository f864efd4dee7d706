"""Words that give a task of four classes two more metrics: a mean, and one whose state is a matrix of counts."""

MORE_METRICS = [
    *(
        "+task.metrics.top2._target_=keras.metrics.SparseTopKCategoricalAccuracy",
        "+task.metrics.top2.k=2",
    ),
    *("+task.metrics.iou._target_=keras.metrics.MeanIoU", "+task.metrics.iou.num_classes=4"),
    "+task.metrics.iou.sparse_y_pred=false",
]
