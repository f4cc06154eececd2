// The sandbox contract as E2B's SDK for JavaScript sees it; `node js_contract.mjs CHECK` runs one check.
import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { Sandbox } from "e2b";

const refused = (call, words) => assert.rejects(call, (error) => new RegExp(words).test(String(error)) || error);

const checks = {
  async commands(box) {
    const done = await box.commands.run("echo out; echo err >&2; echo $A:$PWD", { envs: { A: "x y" }, cwd: "/workspace" });
    assert.deepEqual([done.exitCode, done.stdout, done.stderr], [0, "out\nx y:/workspace\n", "err\n"]);
    await assert.rejects(box.commands.run("exit 3"), (error) => error.exitCode === 3);
    await refused(box.commands.run("sleep 60", { timeoutMs: 500 }), "[Tt]ime");
  },
  async users(box) {
    for (const [user, name, home] of [["root", "root", "/root"], ["agent", "agent", "/home/agent"], ["user", "agent", "/home/agent"]]) {
      assert.equal((await box.commands.run("whoami; pwd", { user })).stdout, `${name}\n${home}\n`);
    }
    await refused(box.commands.run("true", { user: "nobody-here" }), "nobody-here");
    await box.files.write("of-user.txt", "mine", { user: "user" });
    assert.equal((await box.commands.run("stat -c %U /home/agent/of-user.txt")).stdout, "agent\n");
  },
  async files(box) {
    const data = randomBytes(5_000_000);
    await box.files.write("/workspace/deep/er/a.bin", data.buffer.slice(data.byteOffset, data.byteOffset + data.length));
    const read = await box.files.read("/workspace/deep/er/a.bin", { format: "bytes" });
    assert.ok(Buffer.from(read).equals(data));
    assert.equal(await box.files.makeDir("/tmp/d/e"), true);
    assert.equal(await box.files.makeDir("/tmp/d/e"), false);
    assert.deepEqual((await box.files.list("/tmp/d")).map((entry) => entry.path), ["/tmp/d/e"]);
    assert.equal(await box.files.exists("/tmp/none"), false);
    await refused(box.files.read("/tmp/none"), "not found|No such file");
  },
  async background(box) {
    const handle = await box.commands.run("sleep 1; echo done; exit 0", { background: true });
    const other = await Sandbox.connect(box.sandboxId);
    const process = await other.commands.connect(handle.pid);
    assert.equal((await process.wait()).stdout, "done\n");
  },
  async terminal(box) {
    let shown = "";
    const decoder = new TextDecoder();
    const handle = await box.pty.create({ rows: 24, cols: 80, onData: (data) => (shown += decoder.decode(data)) });
    await box.pty.sendInput(handle.pid, new TextEncoder().encode("echo $((40 + 2)) here; exit\n"));
    await handle.wait();
    assert.match(shown, /42 here/);
  },
  async life(box) {
    const tag = randomBytes(8).toString("hex");
    const tagged = await Sandbox.create("base", { metadata: { tag }, timeoutMs: 60_000 });
    const page = Sandbox.list({ query: { metadata: { tag } } });
    assert.deepEqual((await page.nextItems()).map((info) => info.sandboxId), [tagged.sandboxId]);
    await tagged.setTimeout(30_000);
    assert.equal((await tagged.getInfo()).metadata.tag, tag);
    const killed = await Promise.all([1, 2, 3, 4].map(() => Sandbox.kill(tagged.sandboxId)));
    assert.equal(killed.filter(Boolean).length, 1);
    assert.equal(await tagged.isRunning(), false);
    assert.equal(await box.isRunning(), true);
  },
  async refusals(box) {
    const words = "not supported by the local gateway";
    await refused(box.createSnapshot(), `${words}: snapshots .*; .*tar`);
    await refused(box.fork(), `${words}: fork .*; `);
    await refused(box.updateNetwork({ allowOut: ["1.1.1.1"] }), `${words}: network .*127.0.0.1`);
    await refused(box.files.watchDir("/tmp", () => {}), `${words}: .*WatchDir; use files.list`);
    await refused(Sandbox.create("base", { allowInternetAccess: true }), `${words}: allow_internet_access`);
    await refused(Sandbox.create("base", { network: { allowOut: ["example.com"], denyOut: ["0.0.0.0/0"] } }), `${words}: network`);
    await refused(Sandbox.create("no-such-template"), "no-such-template");
    await refused(Sandbox.connect("i" + "0".repeat(20)), "i00000");
    const answer = await fetch(`${process.env.E2B_SANDBOX_URL}/execute`, {
      method: "POST", body: "{}", headers: { "E2b-Sandbox-Id": box.sandboxId, "E2b-Sandbox-Port": "49999" },
    });
    assert.equal(answer.status, 501);
    assert.match(await answer.text(), /the code interpreter; use commands.run/);
  },
};

const [, , name] = process.argv;
if (name === "--list") {
  console.log(Object.keys(checks).join("\n"));
} else {
  const box = await Sandbox.create("base", { timeoutMs: 300_000 });
  try {
    await checks[name](box);
  } finally {
    await box.kill();
  }
}
