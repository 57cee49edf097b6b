//! A cluster that is away or damaged under a running node: how all of it goes on or ends. `states` has what a node says meanwhile.

use std::{
    thread,
    time::{Duration, Instant},
};

use tokio::task::block_in_place;

use crate::{
    cluster::Cluster,
    stage::{ALL_COMMANDS, NO_ANSWER, Stage},
};

/// Regression: a damaged fold mark stopped its partition.
pub(crate) async fn a_node_whose_fold_marks_are_damaged_goes_on() {
    block_in_place(|| {
        let stage = Stage::start(Cluster::start_apart());
        let mut follower = stage.follow();
        let partition =
            |number: u8| if number == 0 { r"\x14".to_owned() } else { format!(r"\x15\x{number:02x}") };
        let damage = (0..64).map(|number| format!(r"; set notibus\x15\x03{} x", partition(number)));
        stage.cluster.cli(&format!("writemode on{}", damage.collect::<String>()));
        assert_eq!(stage.post(), "201", "it is recorded");
        follower.until_all_rows();
        stage.until_ready("200", "\"status\":\"ok\"");
        assert!(stage.served.stop(), "it ends in order");
    });
}

/// Regression: a node that was asked to stop while the cluster was away waited until it was back, and no further signal helped.
pub(crate) async fn everything_ends_without_the_cluster() {
    block_in_place(|| {
        let mut stage = Stage::start(Cluster::start());
        stage.cluster.kill_server(0);
        let _open = stage.begin_to_post();
        stage.until_ready("503", "\"cause\":\"away\"");
        stage.commands_say(&ALL_COMMANDS, 1, NO_ANSWER);

        let began = Instant::now();
        stage.served.ask_to_stop();
        let Stage { served, log, mut cluster, .. } = stage;
        assert_eq!(served.wait(), Some(1), "it did not end in order");
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        assert!(log.text().contains("gave up "), "{}", log.text());

        cluster.restart_server(0);
        cluster.wait_until_available();
        let mut stage = Stage::start(cluster);
        stage.cluster.kill_server(0);
        let _open = stage.begin_to_post();
        stage.until_ready("503", "\"cause\":\"away\"");
        stage.served.ask_to_stop();
        thread::sleep(Duration::from_millis(500));
        let began = Instant::now();
        stage.served.ask_to_stop();
        assert_eq!(stage.served.wait(), Some(0));
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    });
}
