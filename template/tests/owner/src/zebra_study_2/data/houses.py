import csv, os, sys
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Houses(pl.LightningDataModule):
    def __init__(self, path, batch_size=32, shuffle=True):
        super().__init__()
        self.path, self.batch_size = path, batch_size
        self.columns = None

    def setup(self, stage=None):
        rows = list(csv.reader(open(self.path)))
        self.columns = rows[0]
        table = torch.tensor([[float(x) for x in row] for row in rows[1:]])
        print("read", len(table), "rows")
        self.train = TensorDataset(table[:-20, :-1], table[:-20, -1])
        self.mean: float = self.columns

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)
