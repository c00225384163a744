"""Data set loaders, one module per source: built-in data sets, arrays, CSV tables, .npz files, folders of images."""
