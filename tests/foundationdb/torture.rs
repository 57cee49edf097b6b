//! Worlds on a cluster, judged as simulated ones are, while the server dies and comes back.

use std::{
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use tokio::task::block_in_place;

use crate::cluster::{Cluster, text};

/// Processes of a world are killed and stopped, and so is the only server.
pub(crate) async fn nothing_is_lost_while_processes_and_the_server_die() {
    let mut cluster = block_in_place(Cluster::start);
    let mut command = Command::new(env!("CARGO_BIN_EXE_notibus"));
    command.args([
        "torture",
        "--for",
        "1s",
        "--chaos",
        "6s",
        "--from",
        "1",
        "--threads",
        "2",
        "--cluster-file",
    ]);
    command.arg(text(&cluster.file())).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = block_in_place(|| {
        let running = command.spawn().unwrap();
        for pause_ms in [0, 500] {
            thread::sleep(Duration::from_secs(2));
            cluster.kill_server(0);
            thread::sleep(Duration::from_millis(pause_ms));
            cluster.restart_server(0);
        }
        running.wait_with_output().unwrap()
    });
    let [printed, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{printed}{errors}");
    assert!(printed.contains("nothing was lost"), "{printed}");
}
