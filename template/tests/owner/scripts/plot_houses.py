import pandas as pd
import matplotlib.pyplot as plt
from zebra_study_2.data.houses import *

table = pd.read_csv("houses.csv")
table.hist(column="price", bins=50)
plt.savefig("houses.png")
print(f"done")
