from common import dist, new_ddp, say, sgd, train

model = new_ddp()
say(train(model, sgd(model)))
dist.destroy_process_group()
